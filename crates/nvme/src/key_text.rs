//! The text form that DH-HMAC-CHAP's secrets and the pre-shared keys of TLS have in common:
//! `PREFIX:hh:base64:`, with a CRC-32 behind the key.

use alloc::string::String;
use alloc::vec::Vec;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::auth::HashId;

/// CRC-32 as in Ethernet, of the key.
const CRC32: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
/// The length of the CRC, in bytes.
const CRC_LEN: usize = 4;

/// The parts of a text.
pub(crate) struct KeyText {
    /// The key.
    pub(crate) key: Zeroizing<Vec<u8>>,
    /// The hash function that the text names; `None` for `00`.
    pub(crate) hash: Option<HashId>,
    /// Whether the CRC fits the key.
    pub(crate) is_intact: bool,
}

/// The part of a text that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyTextError {
    /// It begins with something else.
    Prefix,
    /// The second part is no hash function.
    Hash,
    /// The third part is not Base64.
    Base64,
}

impl KeyText {
    /// Takes a text apart. White space around it is ignored. Neither the length of the key nor the CRC is
    /// judged.
    pub(crate) fn parse(text: &str, prefix: &str) -> Result<Self, KeyTextError> {
        let rest = text.trim().strip_prefix(prefix).ok_or(KeyTextError::Prefix)?;
        let (hash, rest) = rest.split_once(':').ok_or(KeyTextError::Hash)?;
        let hash = match hash {
            "00" => None,
            "01" => Some(HashId::Sha256),
            "02" => Some(HashId::Sha384),
            "03" => Some(HashId::Sha512),
            _ => return Err(KeyTextError::Hash),
        };
        let base64 = rest.strip_suffix(':').unwrap_or(rest);
        let mut key = Zeroizing::new(STANDARD.decode(base64).map_err(|_| KeyTextError::Base64)?);
        let key_len = key.len().saturating_sub(CRC_LEN);
        let is_intact = key[key_len..] == CRC32.checksum(&key[..key_len]).to_le_bytes();
        key.truncate(key_len);
        Ok(Self { key, hash, is_intact })
    }
}

/// The text of a key.
pub(crate) fn to_text(prefix: &str, hash: Option<HashId>, key: &[u8]) -> Zeroizing<String> {
    let hash = hash.map_or(0, |hash| hash as u8);
    let mut bytes = Zeroizing::new(key.to_vec());
    bytes.extend_from_slice(&CRC32.checksum(key).to_le_bytes());
    Zeroizing::new(alloc::format!("{prefix}{hash:02}:{}:", STANDARD.encode(&*bytes)))
}
