"""The plan on the device."""
