//! Names the shared library as dynamic linkers know it, and keeps it loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The number changes when a program that is built for an older library can't run with a newer one.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libriopipe.so.0");
    // The threads of a volume, and what Rust runs at the end of a thread, are code of this library. So a program that
    // has loaded it with `dlopen` can't unload it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
