"""Networks, layer lists and comparisons that use mucudnn; the package itself never imports them."""
