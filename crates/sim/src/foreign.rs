//! A foreign target. It has NVMe over TCP, and does not have Rio's extension (trap T17).
//!
//! It is Rio's own target behind a filter, the screen. The screen removes the extension's record
//! from the target's answers, and checks each command that arrives. A foreign target may use for
//! its own purposes every field that the standard leaves open. So an initiator that sends it a
//! field or a command of Rio's extension is wrong, however this target reacts.

use riopipe_nvme::command::{Sqe, opcode};
use riopipe_nvme::pdu::{CAPSULE_CMD_LEN, COMMON_LEN, kind};
use riopipe_session::wire::EXTENSION_MAGIC;

/// Bytes of the extension's record.
const RECORD_LEN: usize = 48;
/// The first opcode for vendors, among the commands that a simulated initiator sends to any queue.
const VENDORS: u8 = 0x80;
/// Dwords of a write, write zeroes or flush that are zero without metadata and tags.
const UNUSED: [usize; 7] = [2, 3, 4, 5, 13, 14, 15];
/// The directive type in dword 12.
const DTYPE: u32 = 0xf << 20;

/// The parser of the bytes that arrive over one connection.
#[derive(Debug, Default)]
pub struct Screen {
    held: Vec<u8>,
}

impl Screen {
    /// Receives bytes. Returns the first command among them that uses Rio's extension, if there is
    /// one. The connection has no digests.
    pub fn check(&mut self, bytes: &[u8]) -> Option<String> {
        self.held.extend_from_slice(bytes);
        let mut found = None;
        while let Some(len) = self.next_len() {
            let pdu: Vec<u8> = self.held.drain(..len).collect();
            let sqe = pdu.get(COMMON_LEN..CAPSULE_CMD_LEN).and_then(|sqe| sqe.try_into().ok());
            if let Some(sqe) = sqe.filter(|_| pdu[0] == kind::CAPSULE_CMD) {
                found = found.or(of_rio(&Sqe(sqe)));
            }
        }
        found
    }

    /// The length of the next PDU, once all of it is there.
    fn next_len(&self) -> Option<usize> {
        let len = self.held.get(4..COMMON_LEN)?.try_into().map(u32::from_le_bytes).ok()? as usize;
        (len >= COMMON_LEN && len <= self.held.len()).then_some(len)
    }
}

/// The part of Rio's extension that a command uses, if any.
fn of_rio(sqe: &Sqe) -> Option<String> {
    let code = sqe.opcode();
    if code >= VENDORS {
        return Some(format!("the vendor specific command {code:02x}h"));
    }
    let plain = !matches!(code, opcode::WRITE | opcode::WRITE_ZEROES | opcode::FLUSH);
    let used = |dword: &usize| sqe.dword(*dword) != 0;
    if plain || !UNUSED.iter().any(used) && sqe.dword(12) & DTYPE == 0 {
        return None;
    }
    Some(format!("a command {code:02x}h with fields that the standard leaves zero"))
}

/// Removes the extension's record from the bytes that a target sends.
pub fn hide(bytes: &mut [u8]) {
    let magic = EXTENSION_MAGIC.len();
    let found = bytes.windows(magic).position(|window| window == EXTENSION_MAGIC);
    if let Some(record) = found.and_then(|at| bytes.get_mut(at..at + RECORD_LEN)) {
        record.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, VolumeId};
    use riopipe_order::log_region::LogKind;
    use riopipe_session::wire;

    fn capsule(sqe: &Sqe) -> Vec<u8> {
        let mut pdu = vec![kind::CAPSULE_CMD, 0, CAPSULE_CMD_LEN as u8, 0];
        pdu.extend_from_slice(&(CAPSULE_CMD_LEN as u32).to_le_bytes());
        pdu.extend_from_slice(&sqe.0);
        pdu
    }

    #[test]
    fn t17_the_screen_detects_each_use_of_the_extension() {
        let volume = VolumeId([7; 16]);
        let mut ordered = Sqe::write(1, 8, 1);
        let attribute = Attribute {
            seq: Seq(4),
            span: 1,
            num: 1,
            index: 0,
            ordinal: 1,
            member: Member(0),
            kind: Kind::Write,
            flags: Flags(0),
            lba: 8,
            blocks: 1,
            tag: 0,
        };
        wire::put_attribute(&mut ordered, &attribute, Seq(3));
        for sqe in [ordered, wire::claim_command(), wire::release_command(volume, false)] {
            let plain = [Sqe::write(1, 8, 1), Sqe::flush(1), Sqe::write_zeroes(1, 8, 1, false)];
            let mut bytes: Vec<u8> = plain.iter().flat_map(capsule).collect();
            assert_eq!(Screen::default().check(&bytes), None);
            bytes.extend(capsule(&sqe));
            // In pieces, as from a network.
            let mut screen = Screen::default();
            let found = bytes.chunks(13).filter_map(|piece| screen.check(piece)).count();
            assert_eq!(found, 1);
        }
    }

    #[test]
    fn t17_the_screen_hides_the_extension() {
        let extension = wire::Extension {
            version: wire::EXTENSION_VERSION,
            log_kind: Some(LogKind::Dax),
            log_in_memory: false,
            incarnation: 1,
            region: [1; 16],
            boot: [2; 16],
        };
        let mut page = vec![0; 4096];
        extension.put(&mut page);
        hide(&mut page);
        assert!(page.iter().all(|byte| *byte == 0));
    }
}
