"""The processor's compiled path: C++ in `csrc`, built for the machine it runs on."""
