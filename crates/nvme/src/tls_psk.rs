//! Configured pre-shared keys of TLS in their text form, the PSK interchange format (TCP §3.6.1.5):
//! `NVMeTLSkey-1:hh:base64:`.
//!
//! ```text
//! NVMeTLSkey-1 : 01 : base64(key, then its CRC-32 in little-endian order) :
//!                └ the hash function that makes a retained PSK of the key; 00 for none
//! ```
//!
//! `nvme gen-tls-key` of nvme-cli makes such texts.

use alloc::string::String;
use core::fmt;

use zeroize::Zeroizing;

use crate::auth::HashId;
use crate::key_text::{self, KeyText, KeyTextError};

/// The start of every key. The number is the version of the format.
const PREFIX: &str = "NVMeTLSkey-1:";

/// A configured pre-shared key. Its bytes are cleared when it is dropped, and no formatting shows them.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsPsk {
    key: Zeroizing<alloc::vec::Vec<u8>>,
    hash: Option<HashId>,
}

/// Why a text is no pre-shared key. The message does not show the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsPskError {
    /// It does not begin with `NVMeTLSkey-1:`.
    #[error("it does not begin with {PREFIX}")]
    Prefix,
    /// The hash function is not 00, 01 or 02.
    #[error("its second part is none of 00, 01 and 02")]
    Hash,
    /// The third part is not Base64.
    #[error("its third part is not Base64")]
    Base64,
    /// The key has a wrong length.
    #[error("its key has {0} bytes: 01 takes 32, 02 takes 48, and 00 either")]
    Length(usize),
    /// The CRC does not fit the key.
    #[error("its checksum is wrong: a character was lost or changed")]
    Checksum,
}

impl TlsPsk {
    /// A key of these bytes: 32 for SHA-256, 48 for SHA-384, either without a hash function.
    ///
    /// # Errors
    /// It has another length, or the hash function is another one.
    pub fn new(key: &[u8], hash: Option<HashId>) -> Result<Self, TlsPskError> {
        match (hash, key.len()) {
            (Some(HashId::Sha512), _) => Err(TlsPskError::Hash),
            (None | Some(HashId::Sha256), 32) | (None | Some(HashId::Sha384), 48) => {
                Ok(Self { key: Zeroizing::new(key.to_vec()), hash })
            }
            (_, len) => Err(TlsPskError::Length(len)),
        }
    }

    /// Reads a key. White space around it is ignored.
    ///
    /// # Errors
    /// [`TlsPskError`], with the part that is wrong.
    pub fn parse(text: &str) -> Result<Self, TlsPskError> {
        let KeyText { key, hash, is_intact } =
            KeyText::parse(text, PREFIX).map_err(|error| match error {
                KeyTextError::Prefix => TlsPskError::Prefix,
                KeyTextError::Hash => TlsPskError::Hash,
                KeyTextError::Base64 => TlsPskError::Base64,
            })?;
        let psk = Self::new(&key, hash)?;
        if is_intact { Ok(psk) } else { Err(TlsPskError::Checksum) }
    }

    /// The key as text.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        key_text::to_text(PREFIX, self.hash, &self.key)
    }

    /// The bytes of the key, before any derivation.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The hash function that makes a retained PSK of the key; `None` if it is used as it is.
    #[must_use]
    pub const fn hash(&self) -> Option<HashId> {
        self.hash
    }
}

impl fmt::Debug for TlsPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsPsk(not shown)")
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use std::string::ToString;

    use super::*;

    /// Keys of libnvme's tests (`test/psk.c`), with the first and the last of their bytes.
    const KNOWN: [(&str, Option<HashId>, usize); 3] = [
        ("NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", None, 32),
        (
            "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
            Some(HashId::Sha256),
            32,
        ),
        (
            "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
            Some(HashId::Sha384),
            48,
        ),
    ];

    #[test]
    fn keys_of_another_implementation_are_read() {
        for (text, hash, len) in KNOWN {
            let psk = TlsPsk::parse(text).unwrap();
            assert_eq!((psk.hash(), psk.key().len()), (hash, len));
            assert_eq!((psk.key()[0], psk.key()[len - 1]), (0x55, 0x03));
            assert_eq!(*psk.to_text(), text);
            assert_eq!(TlsPsk::parse(&format!(" {text}\n")), Ok(psk));
        }
    }

    #[test]
    fn a_wrong_part_is_named_and_the_key_is_not() {
        let known = KNOWN[1].0;
        for (text, error) in [
            ("", TlsPskError::Prefix),
            (&known.replace("-1:", "-2:"), TlsPskError::Prefix),
            ("DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", TlsPskError::Prefix),
            (&known.replace(":01:", ":03:"), TlsPskError::Hash),
            (&known.replace(":01:", ":04:"), TlsPskError::Hash),
            (&known.replace(":01:", ":02:"), TlsPskError::Length(32)),
            (&KNOWN[2].0.replace(":02:", ":01:"), TlsPskError::Length(48)),
            (&known.replace("VRL", "V!L"), TlsPskError::Base64),
            (&known.replace("VRL", "VRM"), TlsPskError::Checksum),
            ("NVMeTLSkey-1:01:aaaa:", TlsPskError::Length(0)),
        ] {
            assert_eq!(TlsPsk::parse(text), Err(error), "{text}");
            assert!(!error.to_string().contains("VRL"));
        }
        let psk = TlsPsk::parse(known).unwrap();
        assert!(!format!("{psk:?}").contains("85"), "its first byte");
    }
}
