"""Whether what a tube feeds is what its tables hold, and repair by touching."""
