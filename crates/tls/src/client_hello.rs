//! The identities that a ClientHello offers (RFC 8446 §4.1.2, §4.2.11).
//!
//! The library of TLS checks the message; here it is only read, and any other message has no identities.

/// The type of the extension with the identities.
const PRE_SHARED_KEY: u16 = 41;
/// The length of the version and of the random bytes at the start of a ClientHello.
const HEAD_BYTES: usize = 2 + 32;
/// The length of the age behind each identity.
const AGE_BYTES: usize = 4;
/// The most identities that are read. A host has one, or one for each set of rules.
const IDENTITIES_MAX: usize = 8;

/// Reads from the front of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// Bytes behind their length, which has one byte.
    fn short(&mut self) -> Option<&'a [u8]> {
        let len = self.bytes(1)?[0];
        self.bytes(len.into())
    }

    fn number(&mut self) -> Option<u16> {
        self.bytes(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Bytes behind their length, which has two bytes.
    fn long(&mut self) -> Option<&'a [u8]> {
        let len = self.number()?;
        self.bytes(len.into())
    }
}

/// The identities in a ClientHello, without its message header; at most eight.
pub(crate) fn identities(message: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    if let Some(list) = identity_list(message) {
        let mut list = Reader(list);
        while found.len() < IDENTITIES_MAX
            && let Some(identity) = list.long()
        {
            found.push(identity);
            if list.bytes(AGE_BYTES).is_none() {
                break;
            }
        }
    }
    found
}

fn identity_list(message: &[u8]) -> Option<&[u8]> {
    let mut message = Reader(message);
    message.bytes(HEAD_BYTES)?;
    let _session_id = message.short()?;
    let _cipher_suites = message.long()?;
    let _compression = message.short()?;
    let mut extensions = Reader(message.long()?);
    loop {
        let kind = extensions.number()?;
        let content = extensions.long()?;
        if kind == PRE_SHARED_KEY {
            return Reader(content).long();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(identities: &[&[u8]]) -> Vec<u8> {
        let mut list = Vec::new();
        for identity in identities {
            list.extend_from_slice(&(identity.len() as u16).to_be_bytes());
            list.extend_from_slice(identity);
            list.extend_from_slice(&[0; AGE_BYTES]);
        }
        let mut psk = (list.len() as u16).to_be_bytes().to_vec();
        psk.extend_from_slice(&list);
        psk.extend_from_slice(&[0, 33, 32]);
        psk.extend_from_slice(&[7; 32]);
        let mut extensions = vec![0, 43, 0, 3, 2, 3, 4];
        extensions.extend_from_slice(&PRE_SHARED_KEY.to_be_bytes());
        extensions.extend_from_slice(&(psk.len() as u16).to_be_bytes());
        extensions.extend_from_slice(&psk);
        let mut message = vec![3; HEAD_BYTES];
        message.extend_from_slice(&[2, 9, 9, 0, 2, 0x13, 1, 1, 0]);
        message.extend_from_slice(&(extensions.len() as u16).to_be_bytes());
        message.extend_from_slice(&extensions);
        message
    }

    #[test]
    fn all_identities_are_found_up_to_a_limit() {
        assert_eq!(identities(&hello(&[b"one", b"", b"three"])), [&b"one"[..], b"", b"three"]);
        assert_eq!(identities(&hello(&[&b"x"[..]; 100])).len(), IDENTITIES_MAX);
    }

    #[test]
    fn t18_no_message_is_read_beyond_its_end() {
        let whole = hello(&[b"one", b"two"]);
        for len in 0..whole.len() {
            assert!(identities(&whole[..len]).is_empty(), "the extensions are cut at {len}");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0xff;
            assert!(identities(&changed).len() <= IDENTITIES_MAX);
        }
    }
}
