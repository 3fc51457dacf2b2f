"""Write the topology of a recommendation for the programs that start a training job, one module each.

Each target's module has a `TARGET`, which ``batchwright.exports.registry`` lists. Three modules are shared:
``topology`` has nodes, processes, environment and valid names, ``pod_spec`` the parts of Kubernetes manifests,
``ray_common`` the parts that both ways to a Ray cluster share.
"""
