"""Data sets from files, frames and Hugging Face, and partitions of them over clients."""
