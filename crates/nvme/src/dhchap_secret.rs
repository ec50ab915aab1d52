//! The secrets of DH-HMAC-CHAP in their text form (Base §8.3.5.5.7): `DHHC-1:hh:base64:`.
//!
//! ```text
//! DHHC-1 : 01 : base64(secret, then its CRC-32 in little-endian order) :
//!          └ the hash function that transforms the secret; 00 for none
//! ```
//!
//! `nvme gen-dhchap-key` of nvme-cli makes such texts.

use alloc::string::String;
use core::fmt;

use zeroize::Zeroizing;

use crate::auth::HashId;
use crate::key_text::{self, KeyText, KeyTextError};

/// The start of every secret.
const PREFIX: &str = "DHHC-1:";

/// A secret. Its bytes are cleared when it is dropped, and no formatting shows them.
#[derive(Clone, PartialEq, Eq)]
pub struct DhchapSecret {
    key: Zeroizing<alloc::vec::Vec<u8>>,
    hash: Option<HashId>,
}

/// Why a text is no secret. The message does not show the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DhchapSecretError {
    /// It does not begin with `DHHC-1:`.
    #[error("it does not begin with {PREFIX}")]
    Prefix,
    /// The hash function is not 00, 01, 02 or 03.
    #[error("its second part is none of 00, 01, 02 and 03")]
    Hash,
    /// The third part is not Base64.
    #[error("its third part is not Base64")]
    Base64,
    /// The secret has a wrong length.
    #[error("its secret has {0} bytes, not 32, 48 or 64")]
    Length(usize),
    /// The CRC does not fit the secret.
    #[error("its checksum is wrong: a character was lost or changed")]
    Checksum,
}

impl DhchapSecret {
    /// A secret of these bytes: 32, 48 or 64.
    ///
    /// # Errors
    /// It has another length.
    pub fn new(key: &[u8], hash: Option<HashId>) -> Result<Self, DhchapSecretError> {
        match key.len() {
            32 | 48 | 64 => Ok(Self { key: Zeroizing::new(key.to_vec()), hash }),
            len => Err(DhchapSecretError::Length(len)),
        }
    }

    /// Reads a secret. White space around it is ignored.
    ///
    /// # Errors
    /// [`DhchapSecretError`], with the part that is wrong.
    pub fn parse(text: &str) -> Result<Self, DhchapSecretError> {
        let KeyText { key, hash, is_intact } =
            KeyText::parse(text, PREFIX).map_err(|error| match error {
                KeyTextError::Prefix => DhchapSecretError::Prefix,
                KeyTextError::Hash => DhchapSecretError::Hash,
                KeyTextError::Base64 => DhchapSecretError::Base64,
            })?;
        let secret = Self::new(&key, hash)?;
        if is_intact { Ok(secret) } else { Err(DhchapSecretError::Checksum) }
    }

    /// The secret as text.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        key_text::to_text(PREFIX, self.hash, &self.key)
    }

    /// The bytes of the secret, before any transformation.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The hash function that transforms the secret; `None` if it is used as it is.
    #[must_use]
    pub const fn hash(&self) -> Option<HashId> {
        self.hash
    }
}

impl fmt::Debug for DhchapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DhchapSecret(not shown)")
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    /// A secret that another implementation has made: the Linux kernel's blktests and nvme-cli use it.
    const KNOWN: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";

    #[test]
    fn a_secret_of_another_implementation_is_read() {
        let secret = DhchapSecret::parse(KNOWN).unwrap();
        assert_eq!((secret.key().len(), secret.hash()), (32, None));
        assert_eq!(*secret.to_text(), KNOWN);
        assert_eq!(DhchapSecret::parse(&format!(" {KNOWN}\n")), Ok(secret));
    }

    #[test]
    fn what_is_wrong_is_named_and_the_secret_is_not() {
        for (text, error) in [
            ("", DhchapSecretError::Prefix),
            ("DHHC-2:00:aaaa:", DhchapSecretError::Prefix),
            ("DHHC-1:04:aaaa:", DhchapSecretError::Hash),
            ("DHHC-1:00:a!aa:", DhchapSecretError::Base64),
            ("DHHC-1:00:aaaa:", DhchapSecretError::Length(0)),
            (&KNOWN.replace("ia6z", "ia6y"), DhchapSecretError::Checksum),
        ] {
            assert_eq!(DhchapSecret::parse(text), Err(error), "{text}");
            assert!(!error.to_text_for_test().contains("ia6"));
        }
        let secret = DhchapSecret::parse(KNOWN).unwrap();
        assert!(!format!("{secret:?}").contains("137"));
    }

    impl DhchapSecretError {
        fn to_text_for_test(self) -> String {
            format!("{self} {self:?}")
        }
    }

    #[test]
    fn all_lengths_and_hashes_survive_the_text() {
        for len in [32, 48, 64] {
            for hash in [None, Some(HashId::Sha256), Some(HashId::Sha384), Some(HashId::Sha512)] {
                let secret = DhchapSecret::new(&alloc::vec![len as u8; len], hash).unwrap();
                assert_eq!(DhchapSecret::parse(&secret.to_text()), Ok(secret));
            }
        }
    }
}
