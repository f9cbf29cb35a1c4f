"""How a fast gear reaches the slow gears, and what became of its gradients."""
