"""Pictures: matplotlib plots and the HTML report, from plain tensors and labels."""
