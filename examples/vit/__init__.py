"""A vision transformer that is trained alone, over replicas, through a pipeline, or over tensor ranks as well."""
