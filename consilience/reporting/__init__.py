"""Run folders as pictures, tables and one HTML page; reads records only."""
