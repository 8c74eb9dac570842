"""Deployment between organisations: a Flower app around a config, a local deployment of it, `verify`."""
