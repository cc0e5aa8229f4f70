"""Statistics of the inputs that each weight meets, summed up while a model runs."""
