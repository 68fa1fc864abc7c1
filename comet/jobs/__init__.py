"""The settings of jobs: train, generate, tune, sweep, modular."""
