"""Changes as the server's output plugins, and others, write them."""
