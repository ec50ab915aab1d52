//! The block groups: free blocks and inodes, and their allocation.
