"""The audit log of a deployed run, the receipts that nodes keep of it, and the check of both."""
