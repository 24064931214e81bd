"""Copy a whole database under one snapshot: plan, copy, index, verify."""
