"""What attention models compute when they do in-context linear regression."""
