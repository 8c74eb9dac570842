"""Reports: figures, tables and one HTML page from run folders; reads records only."""
