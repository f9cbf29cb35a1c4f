"""The maths of a class head: margins, softmax over chunks of rows, and its gradients."""
