"""Who reads a parameter: views of parameters, the products that use them, their biases."""
