"""The disk tier: records, segments and the threads that read and write them."""
