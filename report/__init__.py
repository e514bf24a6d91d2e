"""What people read and carry away: terminal tables, documents, listings."""
