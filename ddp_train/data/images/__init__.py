"""What the image data sets share."""
