"""YAML configuration groups (model, parallel) and the tuned profiles that ship with the package."""
