"""Missing experts that the host's cores compute, while others travel over the link."""
