//! Keyed hashes (HMAC, RFC 2104).

use alloc::vec::Vec;

use hmac::{Hmac, Mac};
use riopipe_nvme::auth::HashId;
use sha2::{Sha256, Sha384, Sha512};

/// An HMAC with one of the hash functions.
pub(crate) enum Keyed {
    Sha256(Hmac<Sha256>),
    Sha384(Hmac<Sha384>),
    Sha512(Hmac<Sha512>),
}

impl Keyed {
    pub(crate) fn new(hash: HashId, key: &[u8]) -> Self {
        // An HMAC takes keys of any length, so `new_from_slice` cannot fail.
        const ANY_LENGTH: &str = "an HMAC takes keys of any length";
        match hash {
            HashId::Sha256 => Self::Sha256(Hmac::new_from_slice(key).expect(ANY_LENGTH)),
            HashId::Sha384 => Self::Sha384(Hmac::new_from_slice(key).expect(ANY_LENGTH)),
            HashId::Sha512 => Self::Sha512(Hmac::new_from_slice(key).expect(ANY_LENGTH)),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(mac) => mac.update(bytes),
            Self::Sha384(mac) => mac.update(bytes),
            Self::Sha512(mac) => mac.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        match self {
            Self::Sha256(mac) => mac.finalize().into_bytes().to_vec(),
            Self::Sha384(mac) => mac.finalize().into_bytes().to_vec(),
            Self::Sha512(mac) => mac.finalize().into_bytes().to_vec(),
        }
    }

    pub(crate) fn matches(self, found: &[u8]) -> bool {
        match self {
            Self::Sha256(mac) => mac.verify_slice(found).is_ok(),
            Self::Sha384(mac) => mac.verify_slice(found).is_ok(),
            Self::Sha512(mac) => mac.verify_slice(found).is_ok(),
        }
    }
}
