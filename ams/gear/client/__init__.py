"""Client of the slow gears, with the delivery of its gradients."""
