//! In-band authentication with DH-HMAC-CHAP: the Fabrics commands and the messages that they carry (Base
//! §8.3.5.5; TP 8006).
//!
//! ```text
//! host                                    controller
//!   ── Authentication Send: Negotiate ──────→
//!   ←─ Authentication Receive: Challenge ───
//!   ── Authentication Send: Reply ──────────→
//!   ←─ Authentication Receive: Success1 ────
//!   ── Authentication Send: Success2 ───────→   if the host has challenged the controller, too
//! ```
//!
//! Each side ends a transaction with a failure message instead, if it must.

use alloc::vec;
use alloc::vec::Vec;

use crate::bytes::{ShortData, put, put_u16, put_u32, u16_at, u32_at, whole};
use crate::command::Sqe;
use crate::fabrics::fctype;

/// AUTHREQ in the result of Connect, bit 17 (ATR): the host must authenticate on this queue.
pub const CONNECT_ATR: u64 = 1 << 17;
/// AUTHREQ in the result of Connect, bit 18 (ASCR): the host must also set up a secure channel.
pub const CONNECT_ASCR: u64 = 1 << 18;
/// SECP, the Security Protocol of NVMe's authentication.
const SECURITY_PROTOCOL: u8 = 0xe9;
/// SPSP0 and SPSP1 of NVMe's authentication.
const SPECIFIC: [u8; 2] = [1, 1];
/// AUTH_TYPE of messages that all protocols share.
const COMMON: u8 = 0x00;
/// AUTH_TYPE of the messages of DH-HMAC-CHAP.
const DHCHAP: u8 = 0x01;
/// AUTHID of DH-HMAC-CHAP in Negotiate.
const PROTOCOL_DHCHAP: u8 = 0x01;
/// The length of a protocol descriptor in Negotiate, in bytes.
const DESCRIPTOR_LEN: usize = 64;
/// The offset of the list of hash functions in a protocol descriptor. There are at most 30.
const HASHES_AT: usize = 4;
/// The offset of the list of DH groups in a protocol descriptor. There are at most 30.
const GROUPS_AT: usize = 34;
/// The most entries of either list.
const LIST_MAX: usize = 30;
/// The length of the fixed part of Challenge, Reply, Success1 and Success2, in bytes.
const HEADER_LEN: usize = 16;
/// The length of a failure message, in bytes.
const FAILURE_LEN: usize = 8;
/// The reason code of a failure: *authentication failed*. It has no other.
const REASON_FAILED: u8 = 0x01;

/// The most bytes of a message: a Reply with the largest hash and the largest DH value.
pub const MESSAGE_BYTES_MAX: usize = HEADER_LEN + 2 * 64 + 1024;

/// A hash function (Base §8.3.5.5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum HashId {
    /// SHA-256.
    Sha256 = 1,
    /// SHA-384.
    Sha384 = 2,
    /// SHA-512.
    Sha512 = 3,
}

impl HashId {
    /// All of them, the strongest last.
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    /// The hash function with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| *hash as u8 == code)
    }

    /// Length of its digest, in bytes.
    #[must_use]
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }
}

/// A Diffie-Hellman group (Base §8.3.5.5.3): those of RFC 7919, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum GroupId {
    /// No Diffie-Hellman exchange.
    Null = 0,
    /// 2048 bits.
    Ffdhe2048 = 1,
    /// 3072 bits.
    Ffdhe3072 = 2,
    /// 4096 bits.
    Ffdhe4096 = 3,
    /// 6144 bits.
    Ffdhe6144 = 4,
    /// 8192 bits.
    Ffdhe8192 = 5,
}

impl GroupId {
    /// All of them, the cheapest first.
    pub const ALL: [Self; 6] = [
        Self::Null,
        Self::Ffdhe2048,
        Self::Ffdhe3072,
        Self::Ffdhe4096,
        Self::Ffdhe6144,
        Self::Ffdhe8192,
    ];

    /// The group with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|group| *group as u8 == code)
    }

    /// Length of a DH value, in bytes.
    #[must_use]
    pub const fn len_bytes(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Ffdhe2048 => 256,
            Self::Ffdhe3072 => 384,
            Self::Ffdhe4096 => 512,
            Self::Ffdhe6144 => 768,
            Self::Ffdhe8192 => 1024,
        }
    }

    /// Its name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Ffdhe2048 => "ffdhe2048",
            Self::Ffdhe3072 => "ffdhe3072",
            Self::Ffdhe4096 => "ffdhe4096",
            Self::Ffdhe6144 => "ffdhe6144",
            Self::Ffdhe8192 => "ffdhe8192",
        }
    }
}

/// The explanation of a failure (Base §8.3.5.5.8): what the other side did not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum AuthFailure {
    /// The response to a challenge is wrong.
    #[error("authentication failed")]
    Failed = 1,
    /// No common protocol.
    #[error("no authentication protocol in common")]
    Protocol = 2,
    /// The sides do not agree about a secure channel.
    #[error("secure channel concatenation mismatch")]
    Concatenation = 3,
    /// No common hash function.
    #[error("no hash function in common")]
    Hash = 4,
    /// No common DH group.
    #[error("no Diffie-Hellman group in common")]
    Group = 5,
    /// A message with a wrong content.
    #[error("a message is malformed")]
    Payload = 6,
    /// Another message was expected.
    #[error("a message out of turn")]
    Message = 7,
}

impl AuthFailure {
    /// The explanation with this code; [`AuthFailure::Failed`] for a code that is not known.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            2 => Self::Protocol,
            3 => Self::Concatenation,
            4 => Self::Hash,
            5 => Self::Group,
            6 => Self::Payload,
            7 => Self::Message,
            _ => Self::Failed,
        }
    }
}

/// A message of an authentication transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthMessage<'a> {
    /// The host offers hash functions and DH groups.
    Negotiate(Negotiate),
    /// The controller challenges the host.
    Challenge(Challenge<'a>),
    /// The host answers, and may challenge the controller.
    Reply(Reply<'a>),
    /// The host is authenticated.
    Success1 {
        /// The controller's response to the host's challenge, if there was one.
        response: Option<&'a [u8]>,
    },
    /// The controller is authenticated.
    Success2,
    /// The controller ends the transaction.
    Failure1(AuthFailure),
    /// The host ends the transaction.
    Failure2(AuthFailure),
}

/// The host's offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiate {
    /// Whether the host wants to set up a secure channel (SC_C is not 0).
    pub secure_channel: bool,
    /// The hash functions, those that are known here, in the host's order. `None` if the host offers
    /// another protocol than DH-HMAC-CHAP only.
    pub hashes: Option<Vec<HashId>>,
    /// The DH groups, those that are known here, in the host's order.
    pub groups: Vec<GroupId>,
}

/// The controller's challenge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge<'a> {
    /// The code of the chosen hash function.
    pub hash: u8,
    /// The code of the chosen DH group.
    pub group: u8,
    /// The sequence number S1.
    pub sequence: u32,
    /// The challenge value C1.
    pub challenge: &'a [u8],
    /// The controller's DH value; empty without a DH exchange.
    pub dh_value: &'a [u8],
}

/// The host's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The response R1 to the controller's challenge.
    pub response: &'a [u8],
    /// The host's challenge C2 to the controller, if it makes one.
    pub challenge: Option<&'a [u8]>,
    /// The sequence number S2.
    pub sequence: u32,
    /// The host's DH value; empty without a DH exchange.
    pub dh_value: &'a [u8],
}

/// A message that is none of DH-HMAC-CHAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthMessageError {
    /// It ends before its fields do.
    #[error(transparent)]
    Short(#[from] ShortData),
    /// Its type is not known.
    #[error("an authentication message of type {kind:#04x}, id {id:#04x}")]
    Unknown {
        /// AUTH_TYPE.
        kind: u8,
        /// AUTH_ID.
        id: u8,
    },
    /// A field has a value that it may not have.
    #[error("an authentication message with a wrong {0}")]
    Field(&'static str),
}

impl<'a> AuthMessage<'a> {
    /// AUTH_TYPE and AUTH_ID.
    const fn kind(&self) -> [u8; 2] {
        match self {
            Self::Negotiate(_) => [COMMON, 0x00],
            Self::Challenge(_) => [DHCHAP, 0x01],
            Self::Reply(_) => [DHCHAP, 0x02],
            Self::Success1 { .. } => [DHCHAP, 0x03],
            Self::Success2 => [DHCHAP, 0x04],
            Self::Failure2(_) => [COMMON, 0xf0],
            Self::Failure1(_) => [COMMON, 0xf1],
        }
    }

    /// The message as it is sent, in the transaction `transaction`. `hash_len` is the length of the chosen
    /// hash in bytes, for the messages with a response.
    #[must_use]
    pub fn encode(&self, transaction: u16, hash_len: usize) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN];
        match self {
            Self::Negotiate(negotiate) => {
                bytes.truncate(FAILURE_LEN);
                bytes.resize(FAILURE_LEN + DESCRIPTOR_LEN, 0);
                bytes[6] = u8::from(negotiate.secure_channel);
                bytes[7] = 1;
                let hashes = negotiate.hashes.as_deref().unwrap_or_default();
                let descriptor = &mut bytes[FAILURE_LEN..];
                descriptor[0] = PROTOCOL_DHCHAP;
                descriptor[2] = hashes.len() as u8;
                descriptor[3] = negotiate.groups.len() as u8;
                for (at, hash) in hashes.iter().enumerate() {
                    descriptor[HASHES_AT + at] = *hash as u8;
                }
                for (at, group) in negotiate.groups.iter().enumerate() {
                    descriptor[GROUPS_AT + at] = *group as u8;
                }
            }
            Self::Challenge(challenge) => {
                bytes[6] = challenge.challenge.len() as u8;
                bytes[8] = challenge.hash;
                bytes[9] = challenge.group;
                put_u16(&mut bytes, 10, challenge.dh_value.len() as u16);
                put_u32(&mut bytes, 12, challenge.sequence);
                bytes.extend_from_slice(challenge.challenge);
                bytes.extend_from_slice(challenge.dh_value);
            }
            Self::Reply(reply) => {
                bytes[6] = reply.response.len() as u8;
                bytes[8] = u8::from(reply.challenge.is_some());
                put_u16(&mut bytes, 10, reply.dh_value.len() as u16);
                put_u32(&mut bytes, 12, reply.sequence);
                bytes.extend_from_slice(reply.response);
                match reply.challenge {
                    Some(challenge) => bytes.extend_from_slice(challenge),
                    None => bytes.resize(bytes.len() + reply.response.len(), 0),
                }
                bytes.extend_from_slice(reply.dh_value);
            }
            Self::Success1 { response } => {
                bytes[6] = hash_len as u8;
                bytes[8] = u8::from(response.is_some());
                bytes.resize(HEADER_LEN + hash_len, 0);
                if let Some(response) = response {
                    put(&mut bytes, HEADER_LEN, response);
                }
            }
            Self::Success2 => {}
            Self::Failure1(failure) | Self::Failure2(failure) => {
                bytes.truncate(FAILURE_LEN);
                bytes[6] = REASON_FAILED;
                bytes[7] = *failure as u8;
            }
        }
        put(&mut bytes, 0, &self.kind());
        put_u16(&mut bytes, 4, transaction);
        bytes
    }

    /// Reads a message. Returns it and the number of its transaction. Bytes after its end are ignored.
    ///
    /// # Errors
    /// [`AuthMessageError`], with the reason why it is none.
    pub fn decode(data: &'a [u8]) -> Result<(Self, u16), AuthMessageError> {
        let common = whole::<FAILURE_LEN>(data, "an authentication message")?;
        let transaction = u16_at(common, 4);
        let [kind, id] = [common[0], common[1]];
        let message = match (kind, id) {
            (COMMON, 0x00) => Self::Negotiate(Negotiate::decode(data)?),
            (COMMON, 0xf0) => Self::Failure2(AuthFailure::from_code(common[7])),
            (COMMON, 0xf1) => Self::Failure1(AuthFailure::from_code(common[7])),
            (DHCHAP, 0x01) => Self::Challenge(Challenge::decode(data)?),
            (DHCHAP, 0x02) => Self::Reply(Reply::decode(data)?),
            (DHCHAP, 0x03) => {
                let header = whole::<HEADER_LEN>(data, "an authentication success")?;
                let [response] = parts(data, [header[6].into()])?;
                Self::Success1 { response: (header[8] & 1 == 1).then_some(response) }
            }
            (DHCHAP, 0x04) => {
                whole::<HEADER_LEN>(data, "an authentication success")?;
                Self::Success2
            }
            _ => return Err(AuthMessageError::Unknown { kind, id }),
        };
        Ok((message, transaction))
    }
}

/// The parts with these lengths (bytes) after the fixed part of a message.
fn parts<const N: usize>(data: &[u8], lens: [usize; N]) -> Result<[&[u8]; N], ShortData> {
    let need = HEADER_LEN + lens.iter().sum::<usize>();
    if data.len() < need {
        return Err(ShortData { what: "an authentication message", need, have: data.len() });
    }
    let mut at = HEADER_LEN;
    Ok(lens.map(|len| {
        at += len;
        &data[at - len..at]
    }))
}

impl Negotiate {
    fn decode(data: &[u8]) -> Result<Self, AuthMessageError> {
        let descriptors = usize::from(data[7]);
        let need = FAILURE_LEN + descriptors * DESCRIPTOR_LEN;
        if data.len() < need {
            return Err(ShortData { what: "a negotiation", need, have: data.len() }.into());
        }
        let mut offer = Self { secure_channel: data[6] != 0, hashes: None, groups: Vec::new() };
        let mut descriptors = data[FAILURE_LEN..need].chunks_exact(DESCRIPTOR_LEN);
        let Some(descriptor) = descriptors.find(|descriptor| descriptor[0] == PROTOCOL_DHCHAP)
        else {
            return Ok(offer);
        };
        let (hashes, groups) = (usize::from(descriptor[2]), usize::from(descriptor[3]));
        if hashes > LIST_MAX || groups > LIST_MAX {
            return Err(AuthMessageError::Field("length of a list"));
        }
        let known = |code: &u8| HashId::from_code(*code);
        offer.hashes =
            Some(descriptor[HASHES_AT..HASHES_AT + hashes].iter().filter_map(known).collect());
        let known = |code: &u8| GroupId::from_code(*code);
        offer.groups = descriptor[GROUPS_AT..GROUPS_AT + groups].iter().filter_map(known).collect();
        Ok(offer)
    }
}

impl<'a> Challenge<'a> {
    fn decode(data: &'a [u8]) -> Result<Self, AuthMessageError> {
        let header = whole::<HEADER_LEN>(data, "an authentication challenge")?;
        let [challenge, dh_value] = parts(data, [header[6].into(), u16_at(header, 10).into()])?;
        Ok(Self {
            hash: header[8],
            group: header[9],
            sequence: u32_at(header, 12),
            challenge,
            dh_value,
        })
    }
}

impl<'a> Reply<'a> {
    fn decode(data: &'a [u8]) -> Result<Self, AuthMessageError> {
        let header = whole::<HEADER_LEN>(data, "an authentication reply")?;
        let hash_len = header[6].into();
        let [response, challenge, dh_value] =
            parts(data, [hash_len, hash_len, u16_at(header, 10).into()])?;
        Ok(Self {
            response,
            challenge: (header[8] & 1 == 1).then_some(challenge),
            sequence: u32_at(header, 12),
            dh_value,
        })
    }
}

impl Sqe {
    /// Authentication Send of a message with `len` bytes.
    #[must_use]
    pub fn auth_send(len: u32) -> Self {
        Self::auth(fctype::AUTH_SEND, len)
    }

    /// Authentication Receive of a message with at most `len` bytes.
    #[must_use]
    pub fn auth_receive(len: u32) -> Self {
        Self::auth(fctype::AUTH_RECV, len)
    }

    fn auth(kind: u8, len: u32) -> Self {
        let mut sqe = Self::fabrics(kind);
        put(&mut sqe.0, 41, &SPECIFIC);
        sqe.0[43] = SECURITY_PROTOCOL;
        put_u32(&mut sqe.0, 44, len);
        sqe
    }

    /// The length of the message of an Authentication Send (TL) or Receive (AL), in bytes; `None` if the
    /// command is for another security protocol.
    #[must_use]
    pub fn auth_len(&self) -> Option<u32> {
        let is_nvme = self.0[43] == SECURITY_PROTOCOL && self.0[41..43] == SPECIFIC;
        is_nvme.then(|| u32_at(&self.0, 44))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_survives_the_wire() {
        let (response, challenge) = ([1; 48], [2; 48]);
        let dh_value = [3; 256];
        for message in [
            AuthMessage::Negotiate(Negotiate {
                secure_channel: false,
                hashes: Some(HashId::ALL.to_vec()),
                groups: GroupId::ALL.to_vec(),
            }),
            AuthMessage::Challenge(Challenge {
                hash: 2,
                group: 1,
                sequence: 0x0102_0304,
                challenge: &challenge,
                dh_value: &dh_value,
            }),
            AuthMessage::Reply(Reply {
                response: &response,
                challenge: Some(&challenge),
                sequence: 7,
                dh_value: &dh_value,
            }),
            AuthMessage::Reply(Reply {
                response: &response,
                challenge: None,
                sequence: 0,
                dh_value: &[],
            }),
            AuthMessage::Success1 { response: Some(&response) },
            AuthMessage::Success1 { response: None },
            AuthMessage::Success2,
            AuthMessage::Failure1(AuthFailure::Group),
            AuthMessage::Failure2(AuthFailure::Failed),
        ] {
            let bytes = message.encode(0xabcd, 48);
            assert!(bytes.len() <= MESSAGE_BYTES_MAX);
            assert_eq!(AuthMessage::decode(&bytes), Ok((message.clone(), 0xabcd)));
            // T18: no shorter one is read beyond its end.
            for len in 0..bytes.len() {
                assert!(AuthMessage::decode(&bytes[..len]).is_err(), "{message:?}, {len} bytes");
            }
        }
    }

    /// The bytes as the specification draws them.
    #[test]
    fn the_fields_are_where_the_specification_has_them() {
        let offer = Negotiate {
            secure_channel: false,
            hashes: Some(alloc::vec![HashId::Sha384]),
            groups: alloc::vec![GroupId::Null, GroupId::Ffdhe8192],
        };
        let bytes = AuthMessage::Negotiate(offer).encode(0x0201, 0);
        assert_eq!(bytes.len(), 72);
        assert_eq!(bytes[..8], [0, 0, 0, 0, 1, 2, 0, 1]);
        assert_eq!(bytes[8..14], [1, 0, 1, 2, 2, 0]);
        assert_eq!(bytes[8 + 34..8 + 37], [0, 5, 0]);
        let challenge = Challenge {
            hash: 1,
            group: 2,
            sequence: 0x0403_0201,
            challenge: &[9; 32],
            dh_value: &[8; 384],
        };
        let bytes = AuthMessage::Challenge(challenge).encode(1, 32);
        assert_eq!(bytes[..16], [1, 1, 0, 0, 1, 0, 32, 0, 1, 2, 0x80, 1, 1, 2, 3, 4]);
        assert_eq!((bytes[16], bytes[48], bytes.len()), (9, 8, 16 + 32 + 384));
        let sqe = Sqe::auth_receive(4096);
        assert_eq!((sqe.0[0], sqe.0[4]), (0x7f, 0x06));
        assert_eq!(sqe.0[40..48], [0, 1, 1, 0xe9, 0, 0x10, 0, 0]);
        assert_eq!(sqe.auth_len(), Some(4096));
        assert_eq!(Sqe::disconnect().auth_len(), None);
    }

    #[test]
    fn an_offer_of_another_protocol_or_with_too_many_entries_is_seen() {
        let offer =
            Negotiate { secure_channel: false, hashes: Some(Vec::new()), groups: Vec::new() };
        let mut bytes = AuthMessage::Negotiate(offer).encode(1, 0);
        bytes[8] = 2;
        let Ok((AuthMessage::Negotiate(offer), _)) = AuthMessage::decode(&bytes) else { panic!() };
        assert_eq!(offer.hashes, None);
        bytes[8] = 1;
        bytes[10] = 31;
        let wrong = Err(AuthMessageError::Field("length of a list"));
        assert_eq!(AuthMessage::decode(&bytes), wrong);
    }
}
