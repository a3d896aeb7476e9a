"""What all rooms use: logs, memory, keys, ownership of files and folders, and processes that end with their parent."""
