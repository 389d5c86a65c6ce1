"""Trains a vision transformer on one process, or with replicas, a pipeline and tensor ranks."""
