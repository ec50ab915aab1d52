//! Directories, linear and with a hash tree.
