"""The engine whose clients are in other processes and organisations (`pip install "consilience[flower]"`)."""
