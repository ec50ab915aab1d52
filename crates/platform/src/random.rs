//! Random bytes.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` with random bytes that no peer can guess.
///
/// # Panics
/// If the system has none. Then nothing may be proved to or by a peer.
pub fn random_bytes(bytes: &mut [u8]) {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => panic!("the system has no random bytes: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_filled_each_time_with_others() {
        let (mut first, mut second) = ([0; 1000], [0; 1000]);
        random_bytes(&mut first);
        random_bytes(&mut second);
        assert_ne!(first, second);
        assert_ne!(first[900..], [0; 100]);
    }
}
