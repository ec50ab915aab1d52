//! The main journal, in the format of jbd2.
