"""The shared tier: records of KV that several servers of one model keep together."""
