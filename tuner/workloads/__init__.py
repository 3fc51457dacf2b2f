"""What is trained: from a spec to a model, a worst-case batch and named loss terms."""
