"""What is done with gradients beyond their own rank."""
