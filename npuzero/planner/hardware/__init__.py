"""Hardware model: devices and links of a cluster, and the cost of compute and collectives on them.

In: a Cluster, from the JSON files in ``clusters`` or measured by ``npuzero bench cluster``. Out: seconds and bytes by
level of single collectives (network.py), products and updates (rates.py). Read cluster.py, network.py, rates.py first.
"""
