"""Flower's messages: trees and orders written into records; replies fetched within limits of size and time."""
