"""What reading from tars takes."""
