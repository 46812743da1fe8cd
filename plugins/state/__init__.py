"""States of linear attention: their pool, and the operations that read and write them."""
