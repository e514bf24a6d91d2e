"""What is asked, and the fields that every answer shares."""
