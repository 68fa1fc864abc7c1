"""Every way to run what a suite times, ours and those of others, in the form that the timing loop calls."""
