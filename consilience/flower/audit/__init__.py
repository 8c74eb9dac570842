"""The audit log of a deployed run, the nodes' receipts, and the check of both."""
