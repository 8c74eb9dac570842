"""Where the rows of clients are kept between rounds: on the device, in host memory or in a file."""
