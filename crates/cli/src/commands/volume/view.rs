//! A volume in the form that `rio volume create` and `show` print.

use riopipe::{MemberInfo, OpeningState, Outlook, VolumeInfo};
use riopipe_lab::{
    table::{Align, Table},
    terminal::Terminal,
    units,
};
use serde::Serialize;

use crate::{
    connect::{engine_hint, open_failure},
    output::Report,
};

/// A volume. Its JSON is the library's description of it, its size in bytes, and the result that an
/// opening would have.
#[derive(Debug, Serialize)]
pub(super) struct VolumeView<'a> {
    schema: &'static str,
    #[serde(flatten)]
    info: &'a VolumeInfo,
    bytes: u64,
    state: &'static str,
    /// The error of an opening.
    refusal: Option<RefusalView>,
    /// The engine with which it would be opened.
    opens_with: &'static str,
    /// The reason, if that is not its own.
    fallback: Option<String>,
    /// Whether the volume has just been created.
    #[serde(skip)]
    is_new: bool,
}

#[derive(Debug, Serialize)]
struct RefusalView {
    message: String,
    hint: Option<String>,
}

impl<'a> VolumeView<'a> {
    /// A volume that has just been created.
    pub(super) fn created(info: &'a VolumeInfo) -> Self {
        Self {
            schema: "rio-volume/1",
            info,
            bytes: info.blocks * u64::from(info.block_size),
            state: OpeningState::Free.name(),
            refusal: None,
            opens_with: info.engine.name(),
            fallback: None,
            is_new: true,
        }
    }

    /// A volume that was found, and the result that an opening would have.
    pub(super) fn found(info: &'a VolumeInfo, outlook: &Outlook) -> Self {
        let refusal = outlook.refusal.as_ref().map(|error| {
            let failure = open_failure(error);
            RefusalView { message: failure.message, hint: failure.hint }
        });
        let fallback = outlook.fallback.as_ref().map(|why| match engine_hint(why) {
            Some(hint) => format!("{why}; {hint}"),
            None => why.to_string(),
        });
        Self {
            schema: "rio-volume/1",
            info,
            bytes: info.blocks * u64::from(info.block_size),
            state: outlook.state.name(),
            refusal,
            opens_with: outlook.engine.name(),
            fallback,
            is_new: false,
        }
    }

    /// The state in words, with the next step.
    fn meaning(&self) -> String {
        let mut text = match &self.refusal {
            Some(RefusalView { message, hint }) => {
                let hint = hint.as_ref().map(|hint| format!("\n  {hint}")).unwrap_or_default();
                format!("{}: opening it fails now:\n  {message}{hint}", self.state)
            }
            None if self.state == OpeningState::Unrecovered.name() => {
                "unrecovered: a log holds what has not been recovered: the next command that opens \
                 the volume recovers it; `rio volume recover --dry-run` shows what that would do"
                    .to_owned()
            }
            None => "not in use".to_owned(),
        };
        if let Some(why) = &self.fallback {
            text += &format!("\nit opens with engine {}: {why}", self.opens_with);
        }
        text
    }

    /// The members of which the volume leaves more than a stripe unit unused.
    fn waste(&self) -> String {
        let mut text = String::new();
        for (i, member) in self.info.members.iter().enumerate() {
            if member.unused_blocks >= u64::from(self.info.unit_blocks) {
                let bytes = |blocks: u64| units::bytes(blocks * u64::from(self.info.block_size));
                text += &format!(
                    "member {i}: {} of its {} are not used: each member gives as much as the \
                     smallest\n",
                    bytes(member.unused_blocks),
                    bytes(member.blocks)
                );
            }
        }
        text
    }
}

impl Report for VolumeView<'_> {
    fn text(&self, terminal: &Terminal) -> String {
        let info = self.info;
        let what = match self.is_new {
            true => format!("Volume {:?} is made", info.name),
            false => format!("Volume {:?}", info.name),
        };
        let mut text = format!(
            "{what}: {}, engine {}, {} streams, stripe unit {}, generation {}\n\
             id {}, {}\n\n",
            units::bytes(self.bytes),
            info.engine,
            info.streams,
            units::bytes(u64::from(info.unit_blocks) * u64::from(info.block_size)),
            info.generation,
            info.id,
            self.meaning(),
        );
        let mut table = Table::new(&[
            ("", Align::Right),
            ("member", Align::Left),
            ("size", Align::Right),
            ("volatile cache", Align::Left),
            ("log", Align::Left),
            ("slots", Align::Right),
            ("state", Align::Left),
            ("NGUID", Align::Left),
        ]);
        for (i, member) in info.members.iter().enumerate() {
            table.row([
                i.to_string(),
                member.addr.to_string(),
                units::bytes(member.blocks * u64::from(info.block_size)),
                if member.volatile { "yes" } else { "no" }.to_owned(),
                member.log.clone(),
                if member.slots > 0 { member.slots.to_string() } else { String::new() },
                member_state(member),
                member.nguid.clone(),
            ]);
        }
        text += &table.render(terminal);
        text += &self.waste();
        text
    }
}

fn member_state(member: &MemberInfo) -> String {
    let mut states = Vec::new();
    if let Some(owner) = &member.owner {
        let address = member.owner_address.as_ref().map(|address| format!(" at {address}"));
        states.push(format!("owned by {owner}{}", address.unwrap_or_default()));
    }
    if member.log_lost {
        states.push("log lost".to_owned());
    }
    if member.unrecovered > 0 {
        states.push(format!("{} entries not recovered", member.unrecovered));
    }
    states.join(", ")
}

#[cfg(test)]
mod tests {
    use riopipe::{ClaimError, EngineKind, OpenError};

    use super::*;

    fn info() -> VolumeInfo {
        let member = |addr: &str| MemberInfo {
            addr: addr.parse().unwrap(),
            nqn: "nqn.2026-11.com.example:d".to_owned(),
            nguid: "00".repeat(16),
            blocks: 1 << 18,
            volatile: true,
            log: "file".to_owned(),
            slots: 4000,
            owner: None,
            owner_address: None,
            unrecovered: 0,
            log_lost: false,
            unused_blocks: 15,
        };
        VolumeInfo {
            name: "journal".to_owned(),
            id: riopipe::VolumeId([7; 16]),
            block_size: 4096,
            blocks: 1 << 19,
            unit_blocks: 16,
            streams: 8,
            generation: 3,
            engine: EngineKind::Rio,
            members: vec![member("192.0.2.1"), member("192.0.2.2:4421,ns=2")],
        }
    }

    /// The keys that scripts rely on.
    #[test]
    fn golden_json() {
        let info = info();
        let json = serde_json::to_value(VolumeView::found(&info, &outlook(None))).unwrap();
        let keys = |value: &serde_json::Value| {
            let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
            keys.sort();
            keys.join(" ")
        };
        assert_eq!(
            keys(&json),
            "block_size blocks bytes engine fallback generation id members name opens_with refusal \
             schema state streams unit_blocks"
        );
        assert_eq!(
            keys(&json["members"][0]),
            "addr blocks log log_lost nguid nqn owner owner_address slots unrecovered unused_blocks volatile"
        );
        assert_eq!(json["schema"], "rio-volume/1");
        assert_eq!(json["engine"], "rio");
        assert_eq!(json["bytes"], 2_147_483_648_u64);
        assert_eq!(json["state"], "free");
        assert_eq!(json["members"][1]["addr"], "192.0.2.2:4421,ns=2");
    }

    #[test]
    fn the_text_describes_the_volume_and_its_state() {
        let mut info = info();
        let found = |info: &VolumeInfo, refusal| {
            VolumeView::found(info, &outlook(refusal)).text(&Terminal::PLAIN)
        };
        let text = |info: &VolumeInfo| found(info, None);
        for part in ["\"journal\"", "2 GiB", "engine rio", "64 KiB", "192.0.2.2:4421", "not in use"]
        {
            assert!(text(&info).contains(part), "{part}: {}", text(&info));
        }
        info.members[1].unrecovered = 9;
        assert!(text(&info).contains("9 entries not recovered"));
        info.members[0].owner = Some("nqn.2026-11.com.example:host".to_owned());
        info.members[0].owner_address = Some("192.0.2.9:40000".to_owned());
        assert!(text(&info).contains("owned by nqn.2026-11.com.example:host at 192.0.2.9:40000"));
        assert!(!text(&info).contains("not used"), "less than a stripe unit");
        info.members[1].unused_blocks = 1 << 17;
        assert!(text(&info).contains("member 1: 512 MiB of its 1 GiB are not used"));
        // The error of an opening, with the option that helps.
        let error = ClaimError::LogMissing { target: 0 };
        let text = found(&info, Some(error));
        for part in ["log lost: opening it fails now:\n  volume \"journal\"", "--accept-lost-log"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    fn outlook(refusal: Option<ClaimError>) -> Outlook {
        let error = |error| OpenError::Claim { volume: "journal".into(), target: None, error };
        Outlook {
            state: if refusal.is_some() { OpeningState::LogLost } else { OpeningState::Free },
            refusal: refusal.map(error),
            unrecovered: 0,
            engine: EngineKind::Rio,
            fallback: None,
        }
    }
}
