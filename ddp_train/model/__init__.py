"""Models: plain `nn.Module` classes. The output layer is called `head`, so that an optimizer can tell it from hidden layers."""
