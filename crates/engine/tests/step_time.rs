//! Step-time models: values computed by hand from the closed forms, and the kernels they were fitted to.
