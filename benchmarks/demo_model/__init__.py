"""How the demo model was trained, and the chats that were written for it."""
